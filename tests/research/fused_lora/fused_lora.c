/* This program compares two ways to add a LoRA to a product of a 4-bit matrix. "behind" is the way of the library:
 * matmul, then lora_add, for each of six pieces of the matrix. "fused" begins the sums of each tile with the LoRA
 * (fused.patch). "plain" is the product without a LoRA. One thread; the three ways take turns; the times are medians.
 * "warm" uses one matrix again and again; "cold" goes through many, so that each comes from memory.
 *
 *   git worktree add /tmp/fused && cd /tmp/fused && git apply tests/research/fused_lora/fused.patch
 *   sed -i 's/VISIBILITY_PRESET hidden/VISIBILITY_PRESET default/' neon/CMakeLists.txt
 *   cmake -S neon -B b && make -C b rvm
 *   gcc -O2 -Ineon/include tests/research/fused_lora/fused_lora.c -Lb -lrvm -lm -Wl,-rpath,$PWD/b -o fused_lora */
#include "rvm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <math.h>
typedef int fusedf(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens, size_t begin, size_t end, const float *u, const float *b, size_t rank, float *y, size_t y_stride);
fusedf fused_avx512vnni, fused_avx2;
static double now(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+1e-9*t.tv_nsec;}
static int cmp(const void*a,const void*b){double x=*(double*)a-*(double*)b;return x<0?-1:x>0;}
static void *al(size_t n){return aligned_alloc(64,(n+63)/64*64);}
int main(void){
  const char*impl[2]={"avx512vnni","avx2"}; fusedf*ff[2]={fused_avx512vnni,fused_avx2};
  for(int im=0;im<2;im++) for(int si=0;si<2;si++) for(int cold=0;cold<2;cold++) for(int ti=0;ti<2;ti++) {
    size_t N=si?4096:768,T=ti?8:1,R=8;
    const rvm_matmul*m=rvm_matmul_impl(impl[im]); const rvm_layers*k=rvm_layers_impl(rvm_matmul_layers(m));
    size_t copies=cold?(si?12:300):1; 
    rvm_matrix_spec spec; uint32_t*wt=malloc(N*N/2); for(size_t i=0;i<N*N/8;i++)wt[i]=rand()*2654435761u; 
    uint16_t*sc=malloc(N*N/32*2),*bi=malloc(N*N/32*2); for(size_t i=0;i<N*N/32;i++)sc[i]=0x2000+rand()%512,bi[i]=0xa800+rand()%99;
    rvm_matrix_plan(RVM_Q4,N,N,32,sc,bi,RVM_F16,&spec); size_t mb=rvm_matrix_bytes(&spec);
    char**w=malloc(copies*8);float**B=malloc(copies*8),**A=malloc(copies*8);
    for(size_t c=0;c<copies;c++){w[c]=al(mb);if(c==0)rvm_matrix_pack(&spec,wt,sc,bi,RVM_F16,0,N,w[c]);else memcpy(w[c],w[0],mb);
      B[c]=al(R*N*4);A[c]=al(R*N*4);for(size_t i=0;i<R*N;i++)B[c][i]=rand()/1e9-1,A[c][i]=rand()/1e9-1;}
    float*x=al(T*N*4),*y=al(T*N*4),*z=al(T*N*4),*u=al(T*R*4); for(size_t i=0;i<T*N;i++)x[i]=rand()/1e9-1;
    void*acts=al(rvm_acts_bytes(RVM_ACTS_16,T,N)); m->acts(RVM_ACTS_16,x,N,T,N,0,T,acts);
    size_t tiles=N/16; size_t chunks=6; int reps=(si?40:400)/(T>1?2:1); 
    double *a=malloc(8*reps),*b=malloc(8*reps),*p=malloc(8*reps),*r=malloc(8*reps); size_t at=0;
    double worst=0;
    for(int i=0;i<reps;i++){ for(int o=0;o<3;o++){ int which=(o+i)%3; double t0;
      char*W=w[at%copies];float*BB=B[at%copies],*AA=A[at%copies];at++;
      k->lora_project(x,AA,32,0.5f,T,N,R,u); 
      t0=now();
      if(which==0){for(size_t c=0;c<chunks;c++){size_t b0=c*tiles/chunks,e0=(c+1)*tiles/chunks;m->matmul((void*)W,RVM_ACTS_16,acts,T,b0,e0,y,N);k->lora_add(u,BB,32,T,R,N,b0*16,(e0-b0)*16,y+b0*16,N);} a[i]=now()-t0;}
      else if(which==1){for(size_t c=0;c<chunks;c++){size_t b0=c*tiles/chunks,e0=(c+1)*tiles/chunks;ff[im]((void*)W,RVM_ACTS_16,acts,T,b0,e0,u,BB,R,z,N);} b[i]=now()-t0;}
      else {for(size_t c=0;c<chunks;c++){size_t b0=c*tiles/chunks,e0=(c+1)*tiles/chunks;m->matmul((void*)W,RVM_ACTS_16,acts,T,b0,e0,y,N);} p[i]=now()-t0;}
      }}
    m->matmul((void*)w[0],RVM_ACTS_16,acts,T,0,tiles,y,N);k->lora_project(x,A[0],32,0.5f,T,N,R,u);k->lora_add(u,B[0],32,T,R,N,0,N,y,N);ff[im]((void*)w[0],RVM_ACTS_16,acts,T,0,tiles,u,B[0],R,z,N);
    double top=0;for(size_t i=0;i<T*N;i++){worst=fmax(worst,fabs(y[i]-z[i]));top=fmax(top,fabs(y[i]));}
    for(int i=0;i<reps;i++)r[i]=b[i]/a[i];
    qsort(a,reps,8,cmp);qsort(b,reps,8,cmp);qsort(p,reps,8,cmp);
    printf("%-11s %4zu T=%zu %s plain %8.1f  behind %8.1f  fused %8.1f us   fused/behind median %.3f  p25 %.3f   err %.1e\n",impl[im],N,T,cold?"cold":"warm",1e6*p[reps/2],1e6*a[reps/2],1e6*b[reps/2],b[reps/2]/a[reps/2],b[reps/4]/a[reps/4],worst/top);
    for(size_t c=0;c<copies;c++)free(w[c]),free(A[c]),free(B[c]);
  }
}
